-- STATE. Comes after the functions because it names one. At the end of the transaction, because what an extension's
-- script grants counts as part of the extension, and pg_dump would leave it out.

create constraint trigger regrant
    after insert on outbox.access
    deferrable initially deferred
    for each row
    execute function outbox._regrant();

alter table outbox.access enable always trigger regrant;

comment on trigger regrant on outbox.access is
    'Gives rights anew to the roles that had them, functions that are new included.';
