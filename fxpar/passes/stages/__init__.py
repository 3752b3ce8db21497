"""Where stages begin, and what is transferred between them."""
