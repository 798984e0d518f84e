"""Measurements of the product, behind ``pollux bench``."""
