"""Least squares with residuals that stay on their ranks."""
