"""Reproduction of the paper's claims: each claim is tested by short runs with equal budgets on several seeds.

`claims` defines the claims with the paper's numbers, `arms` the runs that they compare, `verdict` the rule that judges
a comparison, and `report` writes the page. The command is `scripts/reproduce.py`.
"""
