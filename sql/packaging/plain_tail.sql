
commit;
\echo outbox @DONE@ @VERSION@
