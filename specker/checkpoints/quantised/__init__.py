"""Matrices as other libraries quantise them."""
