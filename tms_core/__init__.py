"""What a row of CDAP's Transactional Messaging System is, where it lives, and who may see it."""
