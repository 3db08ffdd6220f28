"""How much attention a query block gives to a key block (PAMA), and which blocks are kept."""
