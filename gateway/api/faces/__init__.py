"""Server faces: how an exchange reaches the Door and its answer the client."""
