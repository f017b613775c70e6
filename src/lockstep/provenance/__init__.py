"""How artefacts were made (`statements`), their locked digests (`lock`), whether they match (`verify`)."""
