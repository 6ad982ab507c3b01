"""How bytes get from the trainer to a medium and back, hashed on the way."""
