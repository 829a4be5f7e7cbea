"""Methods that choose, for every row of an answer, which keys it attends to."""
