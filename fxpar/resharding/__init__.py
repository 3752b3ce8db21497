"""Plans that move a tensor from the ranks and layout of one mesh to those of another."""
