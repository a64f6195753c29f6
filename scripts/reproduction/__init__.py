"""The paper's claims, tested by training small models with equal budgets: `python -m scripts.reproduction --help`.

`claims` says what is compared, `arms` which models are trained for it, `running` runs them, `judging` is the rule for
a verdict, and `page` writes docs/reproduction.md. `baselines` has the models that AFT is compared with.
"""
