"""The mathematics: schemas, argument checks, backend choice and autograd of every op."""
