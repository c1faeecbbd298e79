"""The backends. Each offers the functions that `reference` lists, under the same names."""
