"""The tests: what each function equals, on every backend, against float64."""
