"""The tables and figures of the paper, and ours, from records that any machine can make again."""
