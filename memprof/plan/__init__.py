"""Find what fits a GPU, which settings to choose, and the memory each one saves, by many simulations."""

from memprof.plan.methods import METHODS, Method, methods_for
from memprof.plan.planner import Plan, Row, make_plan

__all__ = ["METHODS", "Method", "Plan", "Row", "make_plan", "methods_for"]
