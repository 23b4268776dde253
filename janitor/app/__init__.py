"""The composition root: from settings to a session, its stores, the lease and the servers."""
