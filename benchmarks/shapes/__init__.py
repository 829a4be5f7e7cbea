"""Models of the shapes that people run, with random weights, for measuring speed."""
