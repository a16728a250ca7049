-- Station 60: settings, pause and resume, version.
\ir setup.psql
select plan(137);

-- Settings: default, what is taken, what is refused.
create temporary table setting (n serial, name text, standard text, good text[], bad text[]) on commit drop;
insert into setting (name, standard, good, bad)
values
    ('default_exchange', 'outbox', array['x', repeat('é', 127) || 'x'], array['', repeat('é', 128)]),
    ('max_body_bytes', '1048576', '{1048576,15728640}', '{1048575,15728641,-1,1.5,1 MiB,99999999999,""}'),
    ('max_attempts', '10', '{1,1000000}', '{0,1000001,ten,99999999999,""}'),
    ('retry_base', '5 s', '{1 ms,1 day}', '{999 us,1 day 1 us,-1 s,soon,1 s 1 s,""}'),
    ('retry_multiplier', '2', '{1,1.5,1000}', '{0.99,1000.1,x,NaN,""}'),
    ('retry_cap', '1 h', '{1 ms,30 days}', '{999 us,30 days 1 us,-1 s,late,""}'),
    ('retry_jitter', '0.25', '{0,0.5,1}', '{-0.1,1.01,x,NaN,""}'),
    ('on_dead', 'continue', '{park,continue}', '{Park,stop,""}'),
    ('strict_keys', 'off', '{on,off}', '{true,yes,""}'),
    ('retention', 'delete', '{forever,delete,0,100 years}', '{never,-1 s,1 d 1 d,100 years 1 us,""}'),
    ('dead_retention', '30 days', '{0,100 years}', '{forever,-1 s,1 d 1 d,100 years 1 us,""}'),
    ('inbox_retention', '7 days', '{0,100 years}', '{forever,-1 s,1 d 1 d,100 years 1 us,""}'),
    ('dedup_window', '1 h', '{1 s,365 days}', '{999 ms,366 days,-1 s,x,""}');

select is((select count(*) from outbox.setting), 0::bigint, 'ships without settings: the defaults are in the code');
select is(outbox._value_of(s.name), s.standard, 'default of ' || s.name) from setting as s order by s.n;
-- What configure() answers, and what counts from then on.
create function pg_temp.configure(name text, value text) returns text[] language plpgsql as $function$
declare
    v_answer text := outbox.configure(name, value);
begin
    return array[v_answer, outbox._value_of(name)];
end
$function$;
select is(pg_temp.configure(s.name, v.value), array[v.value, v.value], format('%s takes %s', s.name, left(v.value, 20)))
from setting as s
cross join unnest(s.good) as v (value)
order by s.n;
select is((select count(*) from outbox.setting), 13::bigint, 'one row a setting');
select throws_ok(
    format('select outbox.configure(%L, %L)', s.name, v.value), 'OB020', 'value cannot be taken for ' || s.name,
    format('%s refuses %s', s.name, coalesce(nullif(left(v.value, 20), ''), 'nothing'))
)
from setting as s
cross join unnest(s.bad) as v (value)
order by s.n;
select is(pg_temp.configure(s.name, null), array[s.standard, s.standard], s.name || ' null: the default again') from setting as s order by s.n;
select is((select count(*) from outbox.setting), 0::bigint, 'and nothing is stored');

select throws_ok($$select outbox.configure(null, '1')$$, 'OB001', 'name must not be null', 'no name');
select throws_ok(format('select outbox.configure(%L, %L)', name, value), 'OB020', 'name is not a setting', format('%L is no setting', name))
from (values ('max_attempt', '1'), ('MAX_ATTEMPTS', '1'), ('', '1'), ('paused', 'on'), ('unknown', null)) as v (name, value);

select outbox.configure('max_attempts', '3') as configured \gset
update outbox.setting set changed_at = '2020-01-01', changed_by = 'nobody';
select outbox.configure('max_attempts', '4') as configured \gset
select ok((select changed_at > now() and changed_by = session_user from outbox.setting), 'it is written down when and by whom it was changed');
delete from outbox.setting;

-- Pause and resume.
select outbox.emit('a', '1') as a, outbox.emit('b', '1') as b \gset
select array_agg(c.id) as claimed from outbox.claim_batch('00000000-0000-0000-0000-000000000001', batch_size => 1) as c \gset
select lives_ok('select outbox.pause()', 'pause()');
select lives_ok('select outbox.pause()', 'pause() again');
select is((select count(*) from outbox.claim_batch('00000000-0000-0000-0000-000000000002')), 0::bigint, 'paused: nothing is handed out');
select lives_ok($$select outbox.emit('c', '1')$$, 'emits go on');
select is(outbox.mark_sent('00000000-0000-0000-0000-000000000001', :'claimed'), 1, 'what is in flight is settled');
select lives_ok('select outbox.resume()', 'resume()');
select lives_ok('select outbox.resume()', 'resume() again');
select is((select count(*) from outbox.claim_batch('00000000-0000-0000-0000-000000000002')), 2::bigint, 'resumed: what waited is handed out');

-- Version.
select matches(outbox.version(), '^[0-9]+\.[0-9]+\.[0-9]+$', 'version() has three numbers');
select is(
    (select count(*) from pg_extension as e where e.extname = 'outbox' and e.extversion <> outbox.version()), 0::bigint, 'and is the extension''s, if it is one'
);

select * from finish();
rollback;
