//! MCP server of the refund desk, over a SQLite database of customers and orders.
//!
//! It enforces no rules; the gateway decides before it.
//!
//! `refund-desk PATH` serves standard streams.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use serde_json::{Value, json};

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS customers (id TEXT PRIMARY KEY, name TEXT NOT NULL, active INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, customer TEXT NOT NULL REFERENCES customers, what TEXT NOT NULL, paid TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS refunds (id INTEGER PRIMARY KEY, \"order\" TEXT NOT NULL, customer TEXT NOT NULL, amount TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS tickets (id INTEGER PRIMARY KEY, \"order\" TEXT NOT NULL, why TEXT NOT NULL);
    INSERT OR IGNORE INTO customers VALUES ('C-1', 'Ada', 1), ('C-2', 'Ben', 1), ('C-4', 'Cy', 0);
    INSERT OR IGNORE INTO orders VALUES
        ('A-1', 'C-1', 'a lamp', '120.00'), ('A-2', 'C-1', 'a rug', '80.50'), ('A-3', 'C-1', 'a sofa', '900.00'),
        ('B-1', 'C-2', 'a bed', '499.00'), ('B-2', 'C-2', 'a desk', '499.00'), ('B-3', 'C-2', 'a vase', '30.00'), ('D-1', 'C-4', 'a chair', '50.00');";

#[derive(Clone)]
struct RefundDeskServer(Arc<Mutex<Connection>>);

fn tool(
    name: &'static str,
    description: &'static str,
    properties: Value,
    required: &[&str],
) -> Tool {
    let schema = json!({"type": "object", "properties": properties, "required": required});
    let schema = if let Value::Object(schema) = schema { schema } else { JsonObject::new() };
    Tool::new(name, description, Arc::new(schema))
}

fn tools() -> Vec<Tool> {
    let text = || json!({"type": "string"});
    vec![
        tool(
            "verify_customer",
            "Verify that a customer exists and is active.\nUse it before anything that moves money.\nAn unknown customer counts as not active; that is a valid result.\nIt has no prerequisites.",
            json!({"customer_id": text()}),
            &["customer_id"],
        ),
        tool(
            "lookup_order",
            "Look up an order: its customer and the amount paid.\nUse it before a refund.\nAn unknown order is not found; that is a valid result.\nIt has no prerequisites.",
            json!({"order_id": text()}),
            &["order_id"],
        ),
        tool(
            "issue_refund",
            "Refund an order to its customer.\nUse it when an order was paid for and went wrong.\nAmounts are in US dollars; large ones need a person.\nCall verify_customer and lookup_order first.",
            json!({"order_id": text(), "customer_id": text(), "amount_usd": {"type": "number"}}),
            &["order_id", "customer_id", "amount_usd"],
        ),
        tool(
            "escalate_to_human",
            "Hand a request over to a person.\nUse it when a rule prevents the request and the customer insists.\nIt creates a ticket and moves no money.\nIt has no prerequisites.",
            json!({"order_id": text(), "why": text()}),
            &["order_id"],
        ),
        tool(
            "end_case",
            "End the case.\nUse it when the customer's request is done.\nAfterwards the customer must be verified again.\nIt has no prerequisites.",
            json!({}),
            &[],
        ),
    ]
}

impl RefundDeskServer {
    fn run(&self, name: &str, arguments: &JsonObject) -> Result<Value, Box<dyn Error>> {
        let text = |key: &str| arguments.get(key).and_then(Value::as_str).unwrap_or_default();
        let books = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match name {
            "verify_customer" => {
                let id = text("customer_id");
                let found = books.query_row(
                    "SELECT name, active FROM customers WHERE id = ?1",
                    [id],
                    |row| Ok((row.get::<_, String>(0)?, row.get::<_, bool>(1)?)),
                );
                match found.optional()? {
                    Some((name, active)) => {
                        json!({"customer_id": id, "name": name, "active": active})
                    }
                    None => json!({"customer_id": id, "active": false}),
                }
            }
            "lookup_order" => {
                let id = text("order_id");
                let row = |row: &rusqlite::Row<'_>| {
                    Ok((
                        row.get::<_, String>(0)?,
                        row.get::<_, String>(1)?,
                        row.get::<_, String>(2)?,
                    ))
                };
                match books
                    .query_row("SELECT customer, what, paid FROM orders WHERE id = ?1", [id], row)
                    .optional()?
                {
                    Some((customer, what, paid)) => {
                        json!({"order_id": id, "customer_id": customer, "what": what, "paid_usd": paid})
                    }
                    None => json!({"found": false}),
                }
            }
            "issue_refund" => {
                let amount: Decimal = arguments
                    .get("amount_usd")
                    .map(ToString::to_string)
                    .unwrap_or_default()
                    .parse()?;
                books.execute(
                    "INSERT INTO refunds (\"order\", customer, amount) VALUES (?1, ?2, ?3)",
                    params![text("order_id"), text("customer_id"), amount.to_string()],
                )?;
                json!({"refund": books.last_insert_rowid(), "refunded_usd": amount.to_string()})
            }
            "escalate_to_human" => {
                books.execute(
                    "INSERT INTO tickets (\"order\", why) VALUES (?1, ?2)",
                    [text("order_id"), text("why")],
                )?;
                json!({"ticket": format!("T-{}", books.last_insert_rowid())})
            }
            "end_case" => json!({"ended": true}),
            other => return Err(format!("unknown tool `{other}`").into()),
        })
    }
}

impl ServerHandler for RefundDeskServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("refund-desk", env!("CARGO_PKG_VERSION")))
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let result = match self.run(&request.name, &request.arguments.unwrap_or_default()) {
            Ok(value) => CallToolResult::structured(value),
            Err(error) => CallToolResult::error(vec![ContentBlock::text(error.to_string())]),
        };
        Ok(result.into())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: refund-desk PATH")?;
    if let Some(parent) = std::path::Path::new(&path).parent() {
        std::fs::create_dir_all(parent)?;
    }
    let books = Connection::open(path)?;
    books.execute_batch(SCHEMA)?;
    let service =
        RefundDeskServer(Arc::new(Mutex::new(books))).serve(rmcp::transport::stdio()).await?;
    service.waiting().await?;
    Ok(())
}
