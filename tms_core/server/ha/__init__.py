"""Several servers on one HBase: leadership, slots, and fenced writes."""
