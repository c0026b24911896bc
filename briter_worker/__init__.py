"""Publishes the posts of a flat-file CMS through git, exactly once each."""
