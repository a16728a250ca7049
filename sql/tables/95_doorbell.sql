-- STATE. The doorbell hangs on the table; it comes after the functions because it names one.

create trigger ring
    after insert on outbox.message
    for each statement
    execute function outbox._ring();

comment on trigger ring on outbox.message is
    'Wakes a sleeping relay; once a statement, not once a row.';
