"""Find what fits a GPU, which settings to choose, and the memory each one saves, by many simulations."""

from memprof.plan.methods import METHODS, Method, methods_for
from memprof.plan.planner import MethodPlan, SearchRow, make_plan

__all__ = ["METHODS", "Method", "MethodPlan", "SearchRow", "make_plan", "methods_for"]
