//! Tests exported spans and metrics with a fake collector that accepts everything.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use serde_json::json;

use crate::gateway::{
    INNER_CONFIG, exchange_over_stdio, project_with_inner_upstream, stdio_input, tools_call_request,
};

/// The first line and headers of a request in lower case, and its body.
type OtlpRequest = (String, Vec<u8>);

struct OtlpCollector {
    address: String,
    requests: Arc<Mutex<Vec<OtlpRequest>>>,
}

impl OtlpCollector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<OtlpRequest>>> = Arc::default();
        let recorded = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let recorded = Arc::clone(&recorded);
                std::thread::spawn(move || {
                    loop {
                        let mut head = String::new();
                        while !head.ends_with("\r\n\r\n") {
                            if stream.read_line(&mut head).unwrap_or(0) == 0 {
                                return;
                            }
                        }
                        let head = head.to_ascii_lowercase();
                        let length = head
                            .lines()
                            .find_map(|line| line.strip_prefix("content-length: "))
                            .unwrap();
                        let mut body = vec![0; length.trim().parse().unwrap()];
                        stream.read_exact(&mut body).unwrap();
                        recorded.lock().unwrap().push((head, body));
                        stream
                            .get_mut()
                            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                            .unwrap();
                    }
                });
            }
        });
        Self { address, requests }
    }

    /// Returns the requests of one kind: `traces` or `metrics`.
    fn requests_for(&self, kind: &str) -> Vec<OtlpRequest> {
        let request_line = format!("post /v1/{kind} http/1.1\r\n");
        self.requests
            .lock()
            .unwrap()
            .iter()
            .filter(|(head, _)| head.starts_with(&request_line))
            .cloned()
            .collect()
    }

    /// Returns all metric values by metric name and attributes.
    fn metric_values(&self) -> BTreeMap<(String, String), Vec<i64>> {
        let mut numbers = BTreeMap::<_, Vec<i64>>::new();
        for (_, body) in self.requests_for("metrics") {
            let resources =
                ExportMetricsServiceRequest::decode(body.as_slice()).unwrap().resource_metrics;
            for metric in resources
                .into_iter()
                .flat_map(|resource| resource.scope_metrics)
                .flat_map(|scope| scope.metrics)
            {
                let points: Vec<_> = match metric.data.unwrap() {
                    Data::Gauge(gauge) => gauge
                        .data_points
                        .into_iter()
                        .map(|point| (point.attributes, as_int(point.value.as_ref())))
                        .collect(),
                    Data::Sum(sum) => sum
                        .data_points
                        .into_iter()
                        .map(|point| (point.attributes, as_int(point.value.as_ref())))
                        .collect(),
                    Data::Histogram(histogram) => histogram
                        .data_points
                        .into_iter()
                        .map(|point| (point.attributes, i64::try_from(point.count).unwrap()))
                        .collect(),
                    other => panic!("{other:?}"),
                };
                for (attributes, number) in points {
                    let attributes: Vec<String> = attribute_map(&attributes)
                        .into_iter()
                        .map(|(name, value)| format!("{name}={value}"))
                        .collect();
                    numbers
                        .entry((metric.name.clone(), attributes.join(" ")))
                        .or_default()
                        .push(number);
                }
            }
        }
        numbers
    }

    /// Returns all spans with their service names and attributes.
    fn spans(&self) -> Vec<(String, Span, BTreeMap<String, String>)> {
        let mut spans = Vec::new();
        for (_, body) in self.requests_for("traces") {
            for resource in
                ExportTraceServiceRequest::decode(body.as_slice()).unwrap().resource_spans
            {
                let service =
                    attribute_map(&resource.resource.unwrap().attributes)["service.name"].clone();
                for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                    let attributes = attribute_map(&span.attributes);
                    spans.push((service.clone(), span, attributes));
                }
            }
        }
        spans
    }
}

fn as_int(number: Option<&Number>) -> i64 {
    match number {
        Some(Number::AsInt(number)) => *number,
        other => panic!("{other:?}"),
    }
}

fn attribute_map(
    all: &[opentelemetry_proto::tonic::common::v1::KeyValue],
) -> BTreeMap<String, String> {
    let text = |value: &Option<opentelemetry_proto::tonic::common::v1::AnyValue>| match value
        .as_ref()
        .and_then(|any| any.value.as_ref())
    {
        Some(Any::StringValue(text)) => text.clone(),
        other => format!("{other:?}"),
    };
    all.iter().map(|pair| (pair.key.clone(), text(&pair.value))).collect()
}

const SERVE_ARGS: [&str; 4] = ["serve", "--stdio", "--config", "toolgate.toml"];

#[test]
fn call_spans_join_trace_of_client() {
    let collector = OtlpCollector::start();
    let project = project_with_inner_upstream("undeclared = \"read\"\n");
    let otlp = format!(
        "[gateway.otlp]\nendpoint = \"{}/\"\nheaders = {{ authorization = {{ file = \"token\" }} }}\n",
        collector.address
    );
    project.write("project/token", "Bearer s3cret-of-the-collector");
    let outer = project.read("project/toolgate.toml");
    project.write("project/toolgate.toml", &format!("{outer}{otlp}"));
    project.write("project/inner.toml", &format!("{INNER_CONFIG}{otlp}"));
    let mut traced_call = tools_call_request(2, "in_calc", json!({"expression": "1 + 1"}));
    traced_call["params"]["_meta"] =
        json!({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"});
    let messages = exchange_over_stdio(
        &project,
        &[traced_call, tools_call_request(3, "in_calc", json!({"expr": "not-to-be-told"}))],
    );
    assert!(
        messages
            .iter()
            .any(|message| message["result"]["structuredContent"] == json!({"result": 2})),
        "{messages:?}"
    );

    let requests = collector.requests.lock().unwrap().clone();
    assert_eq!(
        requests.len(),
        collector.requests_for("traces").len() + collector.requests_for("metrics").len()
    );
    for (head, body) in &requests {
        assert!(head.contains("authorization: bearer s3cret-of-the-collector"), "{head}");
        assert!(
            !String::from_utf8_lossy(body).contains("not-to-be-told"),
            "arguments must not be exported"
        );
    }
    let spans = collector.spans();
    let spans_named =
        |name: &str| spans.iter().filter(|(_, span, _)| span.name == name).collect::<Vec<_>>();
    let (trace_spans, other_spans): (Vec<_>, Vec<_>) =
        spans_named("execute_tool in_calc").into_iter().partition(|(_, span, _)| {
            span.trace_id[..8] == [0x0a, 0xf7, 0x65, 0x19, 0x16, 0xcd, 0x43, 0xdd]
        });
    let [(service, span, attributes)] = trace_spans.as_slice() else { panic!("{spans:#?}") };
    assert_eq!(
        (service.as_str(), span.parent_span_id.as_slice()),
        ("toolgate", &[0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31][..])
    );
    assert_eq!(
        (attributes["gen_ai.tool.name"].as_str(), attributes["toolgate.decision"].as_str()),
        ("in_calc", "succeeded")
    );
    // The upstream receives the span of the call as its parent.
    let inner = spans_named("execute_tool calc");
    let inner: Vec<_> =
        inner.iter().filter(|(_, inner, _)| inner.trace_id == span.trace_id).collect();
    let [(_, inner, _)] = inner.as_slice() else { panic!("{spans:#?}") };
    assert_eq!(inner.parent_span_id, span.span_id);
    // The canary has no span.
    assert!(
        !spans
            .iter()
            .any(|(_, _, attributes)| attributes["gen_ai.agent.name"] == "toolgate-canary")
    );
    // A refused call has a span with its error.
    let [(_, span, attributes)] = other_spans.as_slice() else { panic!("{spans:#?}") };
    assert_eq!(
        (attributes["error.type"].as_str(), attributes["toolgate.gate"].as_str()),
        ("invalid_arguments", "validate")
    );
    assert_eq!(span.status.as_ref().unwrap().code, 2);
}

#[test]
fn unreachable_collector_is_reported_and_calls_continue() {
    // The password in the address must not be logged.
    let project = project_with_inner_upstream(
        "undeclared = \"read\"\n[gateway.otlp]\nendpoint = \"http://ann:sesame@127.0.0.1:1\"\n",
    );
    let (code, stdout, stderr) = project.run(
        &SERVE_ARGS,
        &stdio_input(&[tools_call_request(2, "in_calc", json!({"expression": "1 + 1"}))]),
    );
    assert!(code == 0 && stdout.contains("{\"result\":2}"), "{stdout}{stderr}");
    for (signal, path) in [("spans", "traces"), ("metrics", "metrics")] {
        let warnings: Vec<&str> =
            stderr.lines().filter(|line| line.contains(&format!("cannot send {signal}"))).collect();
        let expected = format!(
            " WARN cannot send {signal} to http://127.0.0.1:1/v1/{path}; they are dropped and calls continue"
        );
        assert_eq!(warnings, [expected], "{stderr}");
    }
}

#[test]
fn invalid_collector_address_is_reported_without_password() {
    let address = "http://ann:ses ame@127.0.0.1:1";
    let by_config = project_with_inner_upstream(&format!(
        "undeclared = \"read\"\n[gateway.otlp]\nendpoint = \"{address}\"\n"
    ))
    .run(&SERVE_ARGS, "");
    let by_variable = project_with_inner_upstream("undeclared = \"read\"\n").run_with(
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", address)],
        &SERVE_ARGS,
        "",
    );
    for (code, _, stderr) in [by_config, by_variable] {
        assert!(
            code != 0
                && stderr.contains("cannot send spans")
                && stderr.contains("http://127.0.0.1:1"),
            "{stderr}"
        );
        assert!(!stderr.contains("ame@") && !stderr.contains("ann:"), "{stderr}");
    }
}

#[test]
fn call_metrics_are_exported() {
    let collector = OtlpCollector::start();
    let project = project_with_inner_upstream(&format!(
        "undeclared = \"read\"\n[gateway.otlp]\nendpoint = \"{}\"\n",
        collector.address
    ));
    let sums = ["1 + 1", "2 + 2"]
        .iter()
        .zip(2..)
        .map(|(sum, id)| tools_call_request(id, "in_calc", json!({"expression": sum})));
    let calls = sums.chain([
        tools_call_request(4, "in_calc", json!({"expr": "not-to-be-told"})),
        tools_call_request(5, "made_up", json!({})),
    ]);
    // Gauges are exported at this interval while the gateway runs.
    let (code, ..) = project.run_with(
        &[("OTEL_METRIC_EXPORT_INTERVAL", "10")],
        &SERVE_ARGS,
        &stdio_input(&calls.collect::<Vec<_>>()),
    );
    assert_eq!(code, 0);
    let numbers = collector.metric_values();
    let calc = "gen_ai.agent.name=default gen_ai.tool.name=in_calc";
    let unknown = "gen_ai.agent.name=(unknown) gen_ai.tool.name=(unknown)";
    for (name, attributes, number) in [
        ("toolgate.calls", format!("{calc} toolgate.decision=succeeded toolgate.gate=run"), 2),
        (
            "toolgate.calls",
            format!(
                "error.type=invalid_arguments {calc} toolgate.decision=refused toolgate.gate=validate"
            ),
            1,
        ),
        (
            "toolgate.calls",
            format!(
                "error.type=unknown_tool {unknown} toolgate.decision=refused toolgate.gate=resolve"
            ),
            1,
        ),
        ("toolgate.call.duration", calc.to_owned(), 3),
        ("toolgate.upstream.up", "toolgate.upstream.name=in".to_owned(), 1),
        ("toolgate.upstream.held_tools", "toolgate.upstream.name=in".to_owned(), 0),
        ("toolgate.canary.refused", String::new(), 1),
    ] {
        assert!(
            numbers
                .get(&(name.to_owned(), attributes))
                .is_some_and(|values| values.contains(&number)),
            "{name}: {numbers:#?}"
        );
    }
    for (_, body) in collector.requests_for("metrics") {
        assert!(!String::from_utf8_lossy(&body).contains("not-to-be-told"));
    }
}

#[test]
fn otel_variables_disable_exporters() {
    for (name, value, traces, metrics) in [
        ("OTEL_SDK_DISABLED", "true", false, false),
        ("OTEL_TRACES_EXPORTER", "none", false, true),
        ("OTEL_METRICS_EXPORTER", "none", true, false),
    ] {
        let collector = OtlpCollector::start();
        let project = project_with_inner_upstream(&format!(
            "undeclared = \"read\"\n[gateway.otlp]\nendpoint = \"{}\"\n",
            collector.address
        ));
        let (code, ..) = project.run_with(
            &[(name, value)],
            &SERVE_ARGS,
            &stdio_input(&[tools_call_request(2, "in_calc", json!({"expression": "1 + 1"}))]),
        );
        assert_eq!(code, 0);
        assert_eq!(
            (
                !collector.requests_for("traces").is_empty(),
                !collector.requests_for("metrics").is_empty()
            ),
            (traces, metrics),
            "{name}"
        );
    }
}
