"""Normalizing flows: sequences of invertible maps that transform a normal distribution into a posterior."""
