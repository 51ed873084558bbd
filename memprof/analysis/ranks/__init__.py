"""Compare the ranks of one distributed run from a few kilobytes of each, without torch."""

from __future__ import annotations

from memprof.analysis.ranks.across import across
from memprof.analysis.ranks.summary import check_summary, rank_summary

__all__ = ["across", "check_summary", "rank_summary"]
