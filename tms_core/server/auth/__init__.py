"""Who may do what: tokens, JSON Web Tokens, rules by topic."""
