"""Compiled solves: f is traced as arithmetic on scalars, simplified, differentiated, and written as kernel source."""
