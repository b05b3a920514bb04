"""Random layer-steps and their optima, as the benchmark has them: they share only `makespan` with the policies."""

from benchmarks.assignment import COSTS, all_choices, draw_costs, draw_work, milp_bound, optimum, work_of

__all__ = ["COSTS", "all_choices", "draw_costs", "draw_work", "milp_bound", "optimum", "work_of"]
