"""The paper's claims, each tested by short runs with equal budgets on several seeds.

`claims` has the claims with the paper's numbers, `arms` the runs that they compare, `verdict` the rule that judges
them, and `report` writes the page. `scripts/reproduce.py` is the command.
"""
