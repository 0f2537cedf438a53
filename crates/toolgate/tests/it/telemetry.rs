//! Tests that each call emits one event, and one span with the names of the GenAI conventions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::json;
use toolgate::{Event, Tool, ToolContext};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::{Layer, Registry};

use crate::support::TestWorld;

type SpanFields = Arc<Mutex<BTreeMap<u64, BTreeMap<String, String>>>>;

struct SpanCollector(SpanFields);

struct FieldVisitor<'a>(&'a mut BTreeMap<String, String>);

impl Visit for FieldVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<S: tracing::Subscriber> Layer<S> for SpanCollector {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        id: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        let mut spans = self.0.lock().unwrap();
        attributes.record(&mut FieldVisitor(spans.entry(id.into_u64()).or_default()));
    }
    fn on_record(
        &self,
        id: &tracing::span::Id,
        values: &tracing::span::Record<'_>,
        _: Context<'_, S>,
    ) {
        values.record(&mut FieldVisitor(self.0.lock().unwrap().entry(id.into_u64()).or_default()));
    }
}

#[tokio::test]
async fn call_emits_one_event_and_one_span() {
    let (spans, events): (SpanFields, Arc<Mutex<Vec<Event>>>) = Default::default();
    let _guard = tracing::subscriber::set_default(
        Registry::default().with(SpanCollector(Arc::clone(&spans))),
    );
    let recorded_events = Arc::clone(&events);
    let announce = Tool::dynamic(
        "announce",
        "Announces.",
        json!({"type": "object", "properties": {"fail": {"type": "boolean"}}}),
        |ctx: ToolContext, args| async move {
            ctx.publish("order.paid", json!({"order": 7}));
            if args["fail"] == true {
                Err(toolgate::Failure::business("no", "no"))
            } else {
                Ok(args)
            }
        },
    )
    .open();
    let world = TestWorld::with_builder(
        |a| a.tool(announce),
        |g| {
            g.on_event(move |event| recorded_events.lock().unwrap().push(event.clone()))
                .on_event(|_| panic!("a listener has a fault"))
        },
    );
    // Another test can have registered the span without a subscriber. Rebuild the cache, so that
    // the span is enabled.
    world.gate.session("agent", "alice", "warm-up").call("look", json!({})).await;
    tracing::callsite::rebuild_interest_cache();
    spans.lock().unwrap().clear();
    let calls = [
        ("act", json!({"how": "ok"})),
        ("act", json!({})),
        ("acts", json!({})),
        ("announce", json!({})),
        ("announce", json!({"fail": true})),
    ];
    for (tool, args) in calls {
        let answer = world.session.call(tool, args).await;
        let invoked = events
            .lock()
            .unwrap()
            .iter()
            .filter(|e| matches!(e, Event::CallEnded(row) if row.call == answer.call))
            .count();
        assert_eq!(invoked, 1, "{tool}");
    }
    // `explain` emits no event.
    let event_count = events.lock().unwrap().len();
    world.session.explain("act", json!({"how": "ok"})).await;
    assert_eq!(events.lock().unwrap().len(), event_count);
    let published = events
        .lock()
        .unwrap()
        .iter()
        .filter(|e| matches!(e, Event::Published { name, .. } if &**name == "order.paid"))
        .count();
    assert_eq!(published, 1, "a failed call publishes nothing");
    let spans: Vec<_> = spans
        .lock()
        .unwrap()
        .values()
        .filter(|s| s.contains_key("gen_ai.tool.name"))
        .cloned()
        .collect();
    assert_eq!(spans.len(), 5);
    let find = |tool: &str, key: &str| {
        spans.iter().find(|s| s["gen_ai.tool.name"] == tool).and_then(|s| s.get(key).cloned())
    };
    assert_eq!(find("act", "otel.name").as_deref(), Some("execute_tool act"));
    assert_eq!(find("act", "gen_ai.operation.name").as_deref(), Some("execute_tool"));
    assert!(find("act", "gen_ai.tool.call.id").is_some_and(|id| id.len() == 36));
    assert_eq!(find("acts", "error.type").as_deref(), Some("unknown_tool"));
    assert_eq!(find("acts", "toolgate.gate").as_deref(), Some("resolve"));
}

/// Checks names of unknown tools and codes of failures, because both can contain any text.
#[tokio::test]
async fn span_contains_no_redacted_text() {
    let spans: SpanFields = Arc::default();
    let _guard = tracing::subscriber::set_default(
        Registry::default().with(SpanCollector(Arc::clone(&spans))),
    );
    let failed =
        || toolgate::Failure::new(toolgate::ErrorCategory::Business, "no-4111".to_owned(), "no");
    let fails =
        Tool::dynamic("fails", "Fails.", json!({"type": "object"}), move |_, _| async move {
            Err(failed())
        })
        .open();
    let world =
        TestWorld::with_builder(|a| a.tool(fails), |g| g.redact_pattern("[0-9]{4}").unwrap());
    world.session.call("look", json!({})).await;
    tracing::callsite::rebuild_interest_cache();
    for tool in ["card-4111", "fails"] {
        assert!(world.session.call(tool, json!({})).await.outcome.error().is_some());
    }
    let spans: Vec<_> = spans
        .lock()
        .unwrap()
        .values()
        .filter(|span| span.contains_key("gen_ai.tool.name"))
        .cloned()
        .collect();
    let rows = world.session.rows().await.unwrap();
    for row in &rows[1..] {
        let span = spans.iter().find(|span| span["gen_ai.tool.name"] == *row.tool).unwrap();
        assert_eq!(span.get("error.type").map(String::as_str), row.code());
        let (name, code) = (&span["otel.name"], &span["error.type"]);
        assert!(
            !name.contains("4111")
                && !code.contains("4111")
                && (name.contains("[redacted ") || code.contains("[redacted ")),
            "{span:?}"
        );
    }
}
