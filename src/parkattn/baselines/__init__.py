"""Methods that PARK is compared with: one file and one AttentionMethod each. They may use the verbs, never PARK itself."""
