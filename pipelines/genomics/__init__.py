"""Genomics: audit, train, classify, score variants."""
