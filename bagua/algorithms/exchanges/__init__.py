"""The values that exchanges are made of, and the state that they remember."""
