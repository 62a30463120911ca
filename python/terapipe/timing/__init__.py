"""Timing on a shared machine: steps of variants in turns, and how much others disturbed. Loads nothing by itself."""
