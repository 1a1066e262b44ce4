"""Models: neural memories whose state is a value, the blocks around them, and a door for each kind of sequence."""
