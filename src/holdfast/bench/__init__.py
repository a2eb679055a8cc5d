"""Benches: what a server does under load, measured from outside, with gates that can fail."""
