"""Tests of runs of arms: small runs of each kind, their records, and repeated and resumed runs."""

import json
from dataclasses import replace

import pytest

from aft_hf.reproduction import running
from aft_hf.reproduction.command import arms_of, run_all
from aft_hf.reproduction.records import Records, digest, without_settings
from aft_hf.reproduction.running import Settings, identify, run_arm, runs_left


pytestmark = pytest.mark.usefixtures("datasets_cache")


def made_up(arm, seed, **values):
    """A record with the keys that a page reads."""
    return {"arm": arm, "seed": seed, "scale": 1, "smoke": False, "metrics": {}} | values


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path, text="generated", images="generated", smoke=True)


def test_a_finished_run_is_not_repeated(settings, monkeypatch):
    first = run_arm("characters-alibi", 0, settings)
    assert {"test", "train", "parameters", "test_at_1x", "test_at_8x"} <= first["metrics"].keys()
    assert first["metrics"]["test_at_1x"] == pytest.approx(first["metrics"]["test"])
    assert [step for step, _ in first["losses"]] == [1, 2, 3, 4]
    monkeypatch.setattr(running, "_train", lambda *_: pytest.fail("a second run"))
    assert run_arm("characters-alibi", 0, settings) == first
    assert json.loads(settings.record_path("characters-alibi", 0).read_text()) == first


def test_a_run_that_was_stopped_resumes_from_its_checkpoint(settings, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("aft_hf.training.loop.finish", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_arm("characters-simple", 0, settings)
    assert not settings.record_path("characters-simple", 0).exists()
    run_arm("characters-simple", 0, settings)
    assert "resuming from" in capsys.readouterr().out


def test_a_record_of_other_settings_is_refused(settings):
    path = settings.record_path("conv", 0)
    path.parent.mkdir()
    path.write_text(json.dumps({"settings": {"steps": 1}}))
    with pytest.raises(ValueError, match=r"conv-0\.json was made with other settings"):
        run_arm("conv", 0, settings)


def test_runs_of_a_page_are_left_out_if_they_have_the_same_settings(settings, tmp_path):
    runs = [("vit", 0), ("conv", 0), ("conv-from-vit", 0)]
    records = [
        made_up(arm, seed, smoke=True, settings_sha256=digest(identify(arm, seed, settings))) for arm, seed in runs
    ]
    assert runs_left(runs, settings, Records([])) == runs
    assert runs_left(runs, settings, Records(records)) == []
    assert runs_left([("conv", 1)], settings, Records(records)) == [("conv", 1)]
    other_data = replace(settings, images=str(tmp_path))
    assert runs_left([("conv", 0)], other_data, Records(records)) == [("conv", 0)]
    # The model of `vit` is trained again for the run that starts from it.
    assert runs_left(runs, settings, Records(records[:2])) == [("vit", 0), ("conv-from-vit", 0)]
    # A record in the output directory counts, too, and its model is there.
    settings.record_path("vit", 0).parent.mkdir()
    settings.record_path("vit", 0).write_text("{}")
    assert runs_left(runs, settings, Records(records[:2])) == [("conv-from-vit", 0)]


def test_a_page_keeps_the_digest_of_the_settings():
    record = {"arm": "conv", "seed": 0, "settings": {"steps": 1, "b": [2]}}
    kept = without_settings(record)
    assert kept == {"arm": "conv", "seed": 0, "settings_sha256": digest({"b": [2], "steps": 1})}
    assert without_settings(kept) == kept


def test_a_converted_vit_is_fine_tuned_from_the_run_of_the_same_seed(settings):
    assert arms_of(["13"]).index("vit") < arms_of(["13"]).index("conv-from-vit")
    for arm in ("vit", "conv-from-vit"):
        record = run_arm(arm, 1, settings)
        assert 0 <= record["metrics"]["test"] <= 1
    report = settings.run_path("conv-from-vit", 1) / "start" / "conversion_report.json"
    assert json.loads(report.read_text())["options"]["kernel_size"] == 9


def test_one_failure_does_not_stop_the_others(settings, monkeypatch):
    monkeypatch.setattr(running, "run_arm", lambda arm, seed, _: 1 / 0 if seed else None)
    monkeypatch.setattr(running, "identify", lambda *_: None)
    with pytest.raises(ZeroDivisionError):  # a defect of the code is not treated as a failed run
        run_all([("conv", 0), ("conv", 1)], settings)

    def fail(arm, seed, _):
        if arm == "vit":
            raise ValueError("the loss is nan")

    monkeypatch.setattr(running, "run_arm", fail)
    assert run_all([("vit", 0), ("conv", 0), ("vit", 1)], settings) == [
        "vit with seed 0 (the loss is nan)",
        "vit with seed 1 (the loss is nan)",
    ]


@pytest.mark.parametrize("what", [["19"], ["x"], ["1", "report"], ["all", "1"]])
def test_what_is_no_claim_is_refused(what):
    with pytest.raises(ValueError, match="is not a claim"):
        arms_of(what)
