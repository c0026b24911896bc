"""The queue as a folder of JSON files, for one worker and any number of producers."""
