"""Programs whose attention a method can take over: one package each, on top of `parkattn.engine`."""
