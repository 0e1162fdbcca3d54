"""One model over several processes: their memory, their messages, and the front that runs them."""
