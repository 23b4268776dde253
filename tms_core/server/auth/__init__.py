"""Authentication and permissions: tokens, JSON Web Tokens, rules by topic."""
