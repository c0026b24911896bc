"""The history: what became of each attempt, kept in one SQLite file that any number of readers may open."""
