"""What fits a GPU, what to set, and what each setting buys: many simulations, compared."""

from memprof.plan.grid import METHODS, Method, methods_for
from memprof.plan.planner import Plan, Row, make_plan

__all__ = ["METHODS", "Method", "Plan", "Row", "make_plan", "methods_for"]
