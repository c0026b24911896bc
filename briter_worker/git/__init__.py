"""Git: the publisher and what it is made of."""
