"""Least squares whose residuals stay on their ranks."""
