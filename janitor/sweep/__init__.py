"""One pass over the tables: find what is due, delete or invert it, write down what was done."""
