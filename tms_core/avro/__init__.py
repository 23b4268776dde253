"""What the server's and the client's side of CDAP's Avro have in common."""
