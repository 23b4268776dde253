"""One pass over the tables: find due rows, delete or invert it, write down what was done."""
