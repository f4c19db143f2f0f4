"""Normalizing flows: invertible maps one after another, from a normal distribution to a posterior."""
