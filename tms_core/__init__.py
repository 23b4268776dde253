"""Rows of CDAP's Transactional Messaging System, their stores, and their visibility."""
