"""Accesses of memory whose result a GPU does not define, and Triton's interpreter does: it runs one program after the
other and one operation after the other, allocates zeros, and reads zeros where a mask hides an element.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import test_backend_contract_aft as contract
import torch


pytest.importorskip("triton")

import triton
import triton.language as tl
from test_triton import BF16, DEVICE, FP32, TRITON, registered, slow  # noqa: F401
from test_triton_decoding import assert_decodes, build, computed  # noqa: F401
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from aft_hf.kernels.triton import causal_launch


pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="the accesses of interpreted kernels are watched"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
NONE, SEVERAL = -1, -2  # in place of the number of a program
# What is read there is not used: the mask of the store excludes it.
HARMLESS = {("repair_kernel", "a program writes what it has read before a barrier")}


@dataclass
class Memory:
    """An argument of a launch: for each element the program that has written and read it last, and when."""

    start: int
    values: np.ndarray  # bits
    size: int  # bytes of an element

    def __post_init__(self) -> None:
        shape = self.values.shape
        self.writer, self.reader = np.full(shape, NONE), np.full(shape, NONE)
        self.written, self.read = np.full(shape, NONE), np.full(shape, NONE)


class Watch:
    """Counts, by kernel, the accesses of the launches of a test that are not defined."""

    def __init__(self, monkeypatch):
        self.found, self.memory, self.kernel, self.program, self.barriers = Counter(), [], "", 0, 0
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        arguments, index = GridExecutor._init_args_hst, InterpreterBuilder.set_grid_idx

        def launched(executor, given, options):
            tensors = arguments(executor, given, options)
            known = [x for x in (*tensors[0], *tensors[1].values()) if torch.is_tensor(x) and x.numel()]
            self.kernel, self.memory = executor.fn.__name__, [self.of_tensor(x) for x in known]
            return tensors

        def of_program(builder, *place):
            self.program, self.barriers = self.program + 1, self.barriers + 1
            return index(builder, *place)

        def masked_load(builder, pointers, mask, other, *options):
            self.read(*self.elements(pointers, mask))
            if other is None and not mask.data.all():
                dtype = pointers.get_element_ty()
                bits = np.full(pointers.data.shape, 0x7FC0, np.uint16)  # NaN in bfloat16
                plain = np.full(pointers.data.shape, np.nan).astype(interpreter._get_np_dtype(dtype))
                other = TensorHandle(bits if dtype == tl.bfloat16 else plain, dtype)
            return load(builder, pointers, mask, other, *options)

        def masked_store(builder, pointers, value, mask, *options):
            addresses, chosen = self.elements(pointers, mask)
            self.write(addresses, np.broadcast_to(value.data, chosen.shape)[chosen])
            return store(builder, pointers, value, mask, *options)

        def barrier(builder):
            self.barriers += 1

        for name, function in {"load": masked_load, "store": masked_store}.items():
            monkeypatch.setattr(InterpreterBuilder, f"create_masked_{name}", function)
        monkeypatch.setattr(InterpreterBuilder, "create_barrier", barrier)
        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", of_program)
        monkeypatch.setattr(GridExecutor, "_init_args_hst", launched)

    @staticmethod
    def of_tensor(x: torch.Tensor) -> Memory:
        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        return Memory(x.data_ptr(), np.zeros(count, np.int64), x.element_size())

    @staticmethod
    def elements(pointers: TensorHandle, mask: TensorHandle) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses that a mask lets through, and the mask."""
        chosen = np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape)
        return pointers.data.astype(np.int64)[chosen], chosen

    def note(self, what: str, wrong: np.ndarray) -> None:
        if wrong.any():
            self.found[self.kernel, what] += 1

    def parts(self, addresses: np.ndarray):
        """Yield the memory that the addresses lie in, their mask, and the numbers of the elements."""
        left = np.ones(addresses.shape, bool)
        for memory in self.memory:
            place = (addresses - memory.start) // memory.size
            inside = left & (place >= 0) & (place < len(memory.values))
            left &= ~inside
            if inside.any():
                yield memory, inside, place[inside]
        self.note("an access is outside of all tensors", left)

    def read(self, addresses: np.ndarray, chosen: np.ndarray) -> None:
        for memory, _, place in self.parts(addresses):
            writer, reader = memory.writer[place], memory.reader[place]
            self.note("a program reads what another one writes", (writer != NONE) & (writer != self.program))
            own = (writer == self.program) & (memory.written[place] == self.barriers)
            self.note("a program reads what it has written before a barrier", own)
            memory.reader[place] = np.where((reader == NONE) | (reader == self.program), self.program, SEVERAL)
            memory.read[place] = self.barriers

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        bits = values.view(f"u{values.dtype.itemsize}").astype(np.int64)
        for memory, inside, place in self.parts(addresses):
            writer, reader, differs = memory.writer[place], memory.reader[place], memory.values[place] != bits[inside]
            others = (reader != NONE) & (reader != self.program)
            self.note("a program writes what another one reads", others)
            own = (reader == self.program) & (memory.read[place] == self.barriers)
            self.note("a program writes what it has read before a barrier", own)
            others = (writer != NONE) & (writer != self.program)
            self.note("two programs write different values", others & differs)
            memory.values[place] = bits[inside]
            self.note("a store has different values for an element", memory.values[place] != bits[inside])
            memory.writer[place], memory.written[place] = self.program, self.barriers


@pytest.fixture
def watch(monkeypatch):
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    yield Watch(monkeypatch)
    torch.use_deterministic_algorithms(deterministic)


@triton.jit
def faulty_kernel(x_ptr, y_ptr, FAULT: tl.constexpr):
    i = tl.arange(0, 8)
    program = tl.program_id(0)
    if FAULT == 0:
        tl.store(y_ptr + i, i + program)
    if FAULT == 1:
        tl.store(y_ptr + 1 + program, program)
        tl.store(y_ptr + 3 + program, tl.load(y_ptr + program))
    if FAULT == 2 or FAULT == 3:
        tl.store(y_ptr + 8 * program + i, i)
        if FAULT == 3:
            tl.debug_barrier()
        tl.store(x_ptr + 8 * program + i, tl.load(y_ptr + 8 * program + 7 - i))
    if FAULT == 4:
        tl.store(y_ptr + i // 2, i)
    if FAULT == 5:
        tl.store(y_ptr + 16 + i, i)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (0, "two programs write different values"),
        (1, "a program reads what another one writes"),
        (2, "a program reads what it has written before a barrier"),
        (3, None),
        (4, "a store has different values for an element"),
        (5, "an access is outside of all tensors"),
    ],
)
def test_faults_are_found(fault, expected, watch):
    x, y = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    faulty_kernel[(1 if fault == 4 else 2,)](x, y if fault != 5 else y[:16], FAULT=fault)
    assert {what for _, what in watch.found} == ({expected} if expected else set())


@pytest.mark.parametrize(
    ("structure", "dtype", "length", "seen"),
    [
        ("alibi causal", FP32, 70, "documents and padding"),
        ("local causal", FP32, 70, "documents and padding"),
        ("conv causal", BF16, 70, "everything"),
        ("full causal", FP32, 35, "everything"),
        ("conv 2-D", FP32, 35, "everything"),
        slow("simple causal", BF16, 100, "everything"),
        slow("local causal, wide", FP32, 129, "everything"),
        slow("local causal, window alone", FP32, 70, "documents"),
        slow("full, table, 4 heads", BF16, 70, "everything"),
        slow("conv 2-D, one key per feature", BF16, 35, "everything"),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", ("moderate", slow("x 90")))
def test_training_is_free_of_races(structure, dtype, length, seen, keys, watch, monkeypatch):
    monkeypatch.setattr(causal_launch, "PROGRAMS", 1000)  # several segments
    contract.assert_exact(contract.case(structure, dtype, 1, length, seen, keys=keys), TRITON)
    assert watch.barriers > 0
    assert watch.found.keys() <= HARMLESS


@pytest.mark.parametrize(
    "structure", ("local causal", "conv causal", slow("a key for each of 2 heads of 35 features"))
)
def test_generation_is_free_of_races(structure, watch, computed):  # noqa: F811
    mixer = build(structure)
    assert_decodes(mixer, torch.randn(2, 40, mixer.hidden_size), (37, 1, 1))
    assert watch.found.keys() <= HARMLESS
